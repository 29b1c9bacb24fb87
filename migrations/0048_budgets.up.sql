set local lock_timeout = '500ms';

-- What a task with everything beneath it, or a whole workspace, may take. Only those that have a budget are here.
create table budgets (
    workspace_id uuid not null,
    id uuid not null, -- of the task at the top, or of the workspace itself
    tokens_max bigint,
    cost_micros_max bigint,
    children_max bigint,
    tokens bigint not null default 0, -- of calls that have ended and were counted
    cost_micros bigint not null default 0,
    children bigint not null default 0,
    counts_since timestamptz not null default now(),
    constraint budgets_pkey primary key (workspace_id, id),
    constraint budgets_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint budgets_limits_something
        check (num_nonnulls(tokens_max, cost_micros_max, children_max) > 0
            and coalesce(least(tokens_max, cost_micros_max, children_max), 1) > 0)
);

-- The decide steps under a budget that are not counted in it yet, with what was reserved for a call under way.
create table budget_calls (
    workspace_id uuid not null,
    budget_id uuid not null,
    task_id uuid not null,
    turn integer not null,
    tokens bigint not null,
    cost_micros bigint not null,
    constraint budget_calls_pkey primary key (workspace_id, budget_id, task_id, turn),
    constraint budget_calls_budget_fkey foreign key (workspace_id, budget_id) references budgets (workspace_id, id)
        on delete cascade
);
