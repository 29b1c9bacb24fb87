set local lock_timeout = '500ms';

-- Queued work. A turn is one decide step (ordinal 0) and the tool calls it asked for (ordinal 1 and up).
-- The primary key is the natural one: a step that is delivered twice can not become two (H-14).
create table steps (
    workspace_id uuid not null,
    task_id uuid not null,
    turn integer not null,
    ordinal integer not null,
    id uuid not null, -- named by children and, as idempotency key, by tools
    kind text not null,
    status text not null default 'queued',
    attempt integer not null default 0, -- grows with every claim; the fence of every write by a worker
    lost_leases integer not null default 0,
    model_attempts integer not null default 0,
    stop_generation integer not null,
    priority smallint not null default 0,
    tag text,
    worker_id uuid,
    lease_expires_at timestamptz,
    run_at timestamptz not null default now(), -- not before this time
    queued_at timestamptz not null default now(),
    started_at timestamptz,
    finished_at timestamptz,
    call_id text,
    tool text,
    arguments text, -- byte for byte as the model wrote them
    result text,
    is_error boolean,
    model text,
    input_tokens bigint,
    output_tokens bigint,
    cached_tokens bigint,
    cost_micros bigint,
    error text,
    constraint steps_pkey primary key (workspace_id, task_id, turn, ordinal),
    constraint steps_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id),
    constraint steps_kind_known check (kind in ('decide_next_action', 'tool_call')),
    constraint steps_status_known check (status in ('queued', 'running', 'completed', 'failed', 'cancelled')),
    constraint steps_decide_is_first check ((kind = 'decide_next_action') = (ordinal = 0)),
    constraint steps_call_is_named check ((kind = 'tool_call') = (call_id is not null and tool is not null and arguments is not null)),
    constraint steps_leased_iff_running
        check ((status = 'running') = (lease_expires_at is not null) and (status <> 'running' or worker_id is not null)),
    constraint steps_finished_iff_terminal
        check ((finished_at is not null) = (status in ('completed', 'failed', 'cancelled')))
) with (fillfactor = 50);
