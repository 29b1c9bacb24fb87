set local lock_timeout = '500ms';

-- A durable promise that a task waits for one thing.
create table awaits (
    workspace_id uuid not null,
    group_id uuid not null,
    ordinal integer not null,
    source_type text not null,
    correlation_key text not null,
    status text not null default 'pending',
    scheduled_resume_at timestamptz, -- when liveness is asked again, or when the wait expires
    payload jsonb, -- what the signal brought
    callback_hash bytea, -- SHA-256 of the token that may signal it without an account
    created_at timestamptz not null default now(),
    settled_at timestamptz,
    constraint awaits_pkey primary key (workspace_id, group_id, ordinal),
    constraint awaits_group_fkey foreign key (workspace_id, group_id) references await_groups (workspace_id, id),
    constraint awaits_source_known check (source_type in ('child_task', 'user_input', 'external', 'timer')),
    constraint awaits_status_known check (status in ('pending', 'completed', 'timed_out', 'skipped', 'cancelled', 'start_failed')),
    constraint awaits_settled_iff_terminal check ((settled_at is not null) = (status <> 'pending'))
) with (fillfactor = 60);
