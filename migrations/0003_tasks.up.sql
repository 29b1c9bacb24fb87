set local lock_timeout = '500ms';

-- One run of one agent on one conversation. Status is in no index, so that its updates stay on the row's page.
create table tasks (
    workspace_id uuid not null,
    id uuid not null,
    -- The only link that may leave the workspace: a public agent lends its definition, nothing else (A-25).
    agent_workspace_id uuid not null,
    agent_id uuid not null,
    agent_version integer not null,
    root_task_id uuid not null,
    parent_task_id uuid,
    parent_step_id uuid,
    ordinal integer, -- place among the children of one delegate call, from 0
    spawn_depth smallint not null default 0,
    source text not null,
    title text not null,
    status text not null default 'pending',
    stop_generation integer not null default 0, -- raised by every stop; spawns, resumes and claims name the one they saw
    priority smallint not null default 0,
    source_metadata jsonb not null default '{}',
    batch_run_id uuid,
    source_key text,
    item_key text,
    last_seq bigint not null default 0, -- the newest seq of the feed
    turn integer not null default 0, -- decide steps written so far
    news_seq bigint not null default 0, -- the newest item that the model ought to answer
    seen_seq bigint not null default 0, -- the newest item that its last committed decision had been shown
    decides_left integer not null, -- until iteration_limit; refilled by a user message
    output text,
    error jsonb, -- {"code","message"}
    created_at timestamptz not null default now(),
    started_at timestamptz,
    finished_at timestamptz,
    deleted_at timestamptz,
    constraint tasks_pkey primary key (workspace_id, id),
    constraint tasks_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint tasks_agent_fkey foreign key (agent_workspace_id, agent_id, agent_version)
        references agent_versions (workspace_id, agent_id, version),
    constraint tasks_parent_fkey foreign key (workspace_id, parent_task_id) references tasks (workspace_id, id),
    constraint tasks_status_known
        check (status in ('pending', 'running', 'waiting_for_input', 'completed', 'failed', 'stopped')),
    constraint tasks_finished_iff_terminal
        check ((finished_at is not null) = (status in ('completed', 'failed', 'stopped'))),
    constraint tasks_failed_has_error check (status <> 'failed' or error is not null),
    constraint tasks_source_known check (source in ('chat', 'spawned')),
    constraint tasks_spawned_iff_parent check ((source = 'spawned') = (parent_task_id is not null)),
    constraint tasks_child_is_complete
        check ((parent_task_id is null) = (parent_step_id is null) and (parent_task_id is null) = (ordinal is null)
            and (parent_task_id is null) = (spawn_depth = 0)),
    constraint tasks_item_is_complete
        check ((batch_run_id is null) or (source_key is not null and item_key is not null)),
    constraint tasks_title_length check (char_length(title) between 1 and 200)
) with (fillfactor = 60);
