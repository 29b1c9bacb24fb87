set local lock_timeout = '500ms';

-- System prompts and tool lists repeat from step to step and from child to child: each text is kept once.
create table prompt_texts (
    workspace_id uuid not null,
    hash bytea not null, -- SHA-256 of the sections
    sections jsonb not null,
    created_at timestamptz not null default now(),
    constraint prompt_texts_pkey primary key (workspace_id, hash),
    constraint prompt_texts_hash_length check (octet_length(hash) = 32)
);

-- What one decide step asked and what came back.
create table decision_logs (
    workspace_id uuid not null,
    task_id uuid not null,
    turn integer not null,
    prompt_hash bytea not null,
    seen_seq bigint not null, -- the messages sent are the feed up to here
    model text not null,
    answer jsonb not null,
    latency_ms integer not null,
    retries integer not null default 0,
    created_at timestamptz not null default now(),
    constraint decision_logs_pkey primary key (workspace_id, task_id, turn),
    constraint decision_logs_task_fkey foreign key (workspace_id, task_id) references tasks (workspace_id, id)
);
