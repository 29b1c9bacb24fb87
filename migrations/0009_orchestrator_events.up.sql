set local lock_timeout = '500ms';

-- The orchestrator's inbox. A processed event is deleted in the transaction that acted on it.
create table orchestrator_events (
    workspace_id uuid not null,
    id bigint generated always as identity,
    task_id uuid not null,
    kind text not null,
    group_id uuid,
    attempts integer not null default 0,
    not_before timestamptz not null default now(),
    error text,
    dead_at timestamptz,
    created_at timestamptz not null default now(),
    constraint orchestrator_events_pkey primary key (workspace_id, id),
    constraint orchestrator_events_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id),
    constraint orchestrator_events_kind_known check (kind in ('new_message', 'turn_committed', 'await_completed')),
    constraint orchestrator_events_group_iff_await check ((kind = 'await_completed') = (group_id is not null))
);
