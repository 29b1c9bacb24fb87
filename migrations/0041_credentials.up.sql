set local lock_timeout = '500ms';

-- Secrets of a workspace, encrypted under a key of the operator that `key_id` names (L-9).
create table credentials (
    workspace_id uuid not null,
    id uuid not null,
    name text not null,
    key_id text not null,
    sealed bytea not null, -- nonce and ciphertext; bound to workspace_id and id
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint credentials_pkey primary key (workspace_id, id),
    constraint credentials_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint credentials_name_key unique (workspace_id, name),
    constraint credentials_name_length check (char_length(name) between 1 and 100)
);
