set local lock_timeout = '500ms';

-- Base tools with some of their arguments bound (L-2). `bindings` holds values, and ids of credentials but never their
-- values.
create table configured_tools (
    workspace_id uuid not null,
    id uuid not null,
    name text not null,
    base_tool text not null,
    description text not null,
    agent_id uuid, -- the one agent that may use it; null: every agent of the workspace that lists it (A-14)
    bindings jsonb not null,
    revision bigint not null default 1, -- grows with every write; the ETag of optimistic updates
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint configured_tools_pkey primary key (workspace_id, id),
    constraint configured_tools_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint configured_tools_agent_fkey foreign key (workspace_id, agent_id) references agents (workspace_id, id),
    constraint configured_tools_name_key unique (workspace_id, name),
    constraint configured_tools_name_form check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'),
    constraint configured_tools_bindings_are_object check (jsonb_typeof(bindings) = 'object')
);

-- Which credentials the bindings name, so that none can be deleted under a tool.
create table configured_tool_credentials (
    workspace_id uuid not null,
    configured_tool_id uuid not null,
    credential_id uuid not null,
    constraint configured_tool_credentials_pkey primary key (workspace_id, configured_tool_id, credential_id),
    constraint configured_tool_credentials_tool_fkey foreign key (workspace_id, configured_tool_id)
        references configured_tools (workspace_id, id) on delete cascade,
    constraint configured_tool_credentials_credential_fkey foreign key (workspace_id, credential_id)
        references credentials (workspace_id, id)
);
