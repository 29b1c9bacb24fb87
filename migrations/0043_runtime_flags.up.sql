set local lock_timeout = '500ms';

-- The operators' switches that are not at their default (P-7). They are the service's, not a workspace's.
create table runtime_flags (
    key text not null,
    value jsonb not null,
    changed_by text not null, -- the subject of a token, or who the command line was told
    changed_by_workspace_id uuid, -- whose subject; null for the command line
    changed_at timestamptz not null default now(),
    constraint runtime_flags_pkey primary key (key),
    constraint runtime_flags_key_length check (char_length(key) between 1 and 100),
    constraint runtime_flags_changed_by_length check (char_length(changed_by) between 1 and 1000)
);
