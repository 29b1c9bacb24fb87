set local lock_timeout = '500ms';

-- What a model is told whose answer does not fit its agent's output_schema. The new checks are not validated: that would
-- read the whole table under a lock, and all rows that were there keep to the narrower ones.
alter table task_items
    drop constraint task_items_kind_known,
    add constraint task_items_kind_known check (kind in ('user_message', 'assistant_message', 'resume_message',
        'repair_message', 'tool_call', 'tool_result', 'delegation', 'wait', 'status')) not valid,
    drop constraint task_items_message_has_text,
    add constraint task_items_message_has_text check (kind not in ('user_message', 'assistant_message', 'resume_message',
        'repair_message', 'tool_result') or text is not null) not valid;
