set local lock_timeout = '500ms';

-- Model text on its way to watchers in other processes. Ephemeral by nature, hence unlogged: a crash may lose it.
create unlogged table stream_chunks (
    workspace_id uuid not null,
    task_id uuid not null,
    id bigint generated always as identity,
    turn integer not null,
    text text not null,
    created_at timestamptz not null default now(),
    constraint stream_chunks_pkey primary key (workspace_id, task_id, id)
);
