set local lock_timeout = '500ms';

-- Who is alive. Only a hint: a process that knows of no other one sends no notifications.
create table processes (
    id uuid not null,
    roles text[] not null,
    host text not null,
    pid integer not null,
    started_at timestamptz not null default now(),
    heartbeat_at timestamptz not null default now(),
    constraint processes_pkey primary key (id)
);
