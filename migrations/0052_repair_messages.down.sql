set local lock_timeout = '500ms';

update task_items set kind = 'user_message' where kind = 'repair_message';
alter table task_items
    drop constraint task_items_kind_known,
    add constraint task_items_kind_known check (kind in ('user_message', 'assistant_message', 'resume_message',
        'tool_call', 'tool_result', 'delegation', 'wait', 'status')),
    drop constraint task_items_message_has_text,
    add constraint task_items_message_has_text
        check (kind not in ('user_message', 'assistant_message', 'resume_message', 'tool_result') or text is not null);
