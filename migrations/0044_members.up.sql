set local lock_timeout = '500ms';

-- Local users, each of one workspace (P-4).
create table members (
    workspace_id uuid not null,
    id uuid not null,
    username text not null,
    role text not null,
    password_hash text not null, -- argon2id, in PHC form
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint members_pkey primary key (workspace_id, id),
    constraint members_username_key unique (workspace_id, username),
    constraint members_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint members_username_form check (username ~ '^[a-z0-9._@+-]{1,254}$'),
    constraint members_role_known check (role in ('member', 'admin', 'operator'))
);

-- Log-ins that have not ended. Of a cookie's token only the hash is kept.
create table sessions (
    workspace_id uuid not null,
    member_id uuid not null,
    id uuid not null,
    token_hash bytea not null,
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    constraint sessions_pkey primary key (workspace_id, member_id, id),
    constraint sessions_token_key unique (token_hash),
    constraint sessions_member_fkey foreign key (workspace_id, member_id) references members (workspace_id, id)
        on delete cascade,
    constraint sessions_token_length check (octet_length(token_hash) = 32)
);

-- Keys of programs. Of a key only the hash is kept, and its beginning, by which people know it again.
create table api_keys (
    workspace_id uuid not null,
    id uuid not null,
    name text not null,
    role text not null,
    prefix text not null,
    key_hash bytea not null,
    created_by text not null,
    created_at timestamptz not null default now(),
    revoked_at timestamptz,
    constraint api_keys_pkey primary key (workspace_id, id),
    constraint api_keys_hash_key unique (key_hash),
    constraint api_keys_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint api_keys_name_length check (char_length(name) between 1 and 100),
    constraint api_keys_role_known check (role in ('member', 'admin', 'operator')),
    constraint api_keys_hash_length check (octet_length(key_hash) = 32)
);
