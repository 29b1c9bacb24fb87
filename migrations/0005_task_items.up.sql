set local lock_timeout = '500ms';

-- The feed of a task, append-only, in `seq` order without gaps. The model's history is made from the same rows.
create table task_items (
    workspace_id uuid not null,
    task_id uuid not null,
    seq bigint not null,
    id uuid not null,
    kind text not null,
    turn integer, -- of assistant messages and what belongs to their calls
    seen_seq bigint, -- assistant messages: the newest item that the model had been shown
    text text,
    data jsonb,
    created_at timestamptz not null default now(),
    constraint task_items_pkey primary key (workspace_id, task_id, seq),
    constraint task_items_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id),
    constraint task_items_kind_known check (kind in ('user_message', 'assistant_message', 'resume_message',
        'tool_call', 'tool_result', 'delegation', 'wait', 'status')),
    constraint task_items_message_has_text
        check (kind not in ('user_message', 'assistant_message', 'resume_message', 'tool_result') or text is not null),
    constraint task_items_assistant_has_turn check (kind <> 'assistant_message' or (turn is not null and seen_seq is not null))
);
