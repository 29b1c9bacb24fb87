set local lock_timeout = '500ms';

-- The waits of one call. The counters are written only under this row's lock, by the one function that settles awaits.
create table await_groups (
    workspace_id uuid not null,
    id uuid not null,
    task_id uuid not null,
    step_id uuid not null,
    source_type text not null,
    strategy text not null,
    quorum integer,
    status text not null default 'open',
    total integer not null,
    pending integer not null,
    completed integer not null default 0,
    window_seconds integer, -- length of one liveness window
    about jsonb, -- what a wait that is not for children is for: {"question"}, {"key"}, {"until"}
    batch_run_id uuid,
    created_at timestamptz not null default now(),
    closed_at timestamptz,
    resumed_at timestamptz, -- set with the one resume message
    constraint await_groups_pkey primary key (workspace_id, id),
    constraint await_groups_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id),
    constraint await_groups_source_known check (source_type in ('child_task', 'user_input', 'external', 'timer')),
    constraint await_groups_strategy_known check (strategy in ('all_required', 'any', 'quorum')),
    constraint await_groups_quorum_fits check ((strategy = 'quorum') = (quorum is not null) and (quorum is null or quorum between 1 and total)),
    constraint await_groups_status_known check (status in ('open', 'completed', 'skipped', 'cancelled')),
    constraint await_groups_closed_iff_not_open check ((closed_at is not null) = (status <> 'open')),
    constraint await_groups_closed_has_no_pending check (status = 'open' or pending = 0),
    constraint await_groups_counts_fit check (total >= 1 and pending >= 0 and completed >= 0 and pending + completed <= total),
    constraint await_groups_resumed_is_closed check (resumed_at is null or closed_at is not null)
) with (fillfactor = 50);
