set local lock_timeout = '500ms';

-- Jobs that have the missing delegation profiles of a workspace written (A-28). At most one process works on one.
create table profile_backfills (
    workspace_id uuid not null,
    id uuid not null,
    force boolean not null,
    status text not null default 'running',
    attempt integer not null default 0, -- grows with every claim: what an earlier holder writes is refused
    lost_leases integer not null default 0, -- since an agent was settled last
    lease_expires_at timestamptz,
    created_at timestamptz not null default now(),
    finished_at timestamptz,
    constraint profile_backfills_pkey primary key (workspace_id, id),
    constraint profile_backfills_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint profile_backfills_status_known check (status in ('running', 'completed')),
    constraint profile_backfills_finished_iff_completed check ((finished_at is not null) = (status = 'completed')),
    constraint profile_backfills_leased_while_running check (lease_expires_at is null or status = 'running')
);

-- What has become of each agent that was there when the job began.
create table profile_backfill_agents (
    workspace_id uuid not null,
    backfill_id uuid not null,
    agent_id uuid not null,
    status text not null default 'pending',
    reason text,
    constraint profile_backfill_agents_pkey primary key (workspace_id, backfill_id, agent_id),
    constraint profile_backfill_agents_backfill_fkey foreign key (workspace_id, backfill_id)
        references profile_backfills (workspace_id, id) on delete cascade,
    constraint profile_backfill_agents_agent_fkey foreign key (workspace_id, agent_id) references agents (workspace_id, id),
    constraint profile_backfill_agents_status_known check (status in ('pending', 'generated', 'skipped', 'failed')),
    constraint profile_backfill_agents_reason_iff_none check ((reason is not null) = (status in ('skipped', 'failed')))
);
