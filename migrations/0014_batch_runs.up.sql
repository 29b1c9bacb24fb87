set local lock_timeout = '500ms';

-- One source-mode enumeration. Outcomes are derived from tasks; no counter here can drift (S-30).
create table batch_runs (
    workspace_id uuid not null,
    id uuid not null,
    task_id uuid not null,
    step_id uuid not null,
    source_key text not null,
    target_agent_id uuid not null,
    status text not null default 'running',
    pages_read integer not null default 0,
    total_items integer,
    created_children integer,
    skipped jsonb not null default '{}',
    attached integer not null default 0,
    manifest jsonb,
    error text,
    created_at timestamptz not null default now(),
    finished_at timestamptz,
    constraint batch_runs_pkey primary key (workspace_id, id),
    constraint batch_runs_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id),
    constraint batch_runs_status_known check (status in ('running', 'enqueued', 'failed')),
    constraint batch_runs_finished_iff_terminal check ((finished_at is not null) = (status <> 'running')),
    constraint batch_runs_failed_has_error check (status <> 'failed' or error is not null)
);

alter table tasks add constraint tasks_batch_fkey
    foreign key (workspace_id, batch_run_id) references batch_runs (workspace_id, id);
alter table await_groups add constraint await_groups_batch_fkey
    foreign key (workspace_id, batch_run_id) references batch_runs (workspace_id, id);
