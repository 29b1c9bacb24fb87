set local lock_timeout = '500ms';

-- Where a workspace's own models answer, each with its key, encrypted under a key of the operator (L-10).
create table model_providers (
    workspace_id uuid not null,
    id uuid not null,
    name text not null, -- as agents name it in `model.provider`
    kind text not null,
    base_url text, -- null: the provider's own
    model text, -- of agents that name none
    is_default boolean not null, -- answers for agents that name no provider
    key_id text, -- the operator's key; null with `sealed`: nothing is sent
    sealed bytea, -- nonce and ciphertext; bound to workspace_id and id
    key_hint text, -- the last characters of a long key, to know it by
    revision bigint not null default 1, -- grows with every write; the ETag of optimistic updates
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint model_providers_pkey primary key (workspace_id, id),
    constraint model_providers_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint model_providers_name_key unique (workspace_id, name),
    constraint model_providers_name_length check (char_length(name) between 1 and 100),
    constraint model_providers_kind_known check (kind in ('openai', 'anthropic', 'gemini')),
    constraint model_providers_key_whole check ((key_id is null) = (sealed is null)),
    constraint model_providers_hint_of_key check (key_hint is null or sealed is not null)
);
