set local lock_timeout = '500ms';

-- An agent is one group of versions: `id` is its agent_group_id. `draft` is what authors edit; tasks run published versions.
create table agents (
    workspace_id uuid not null,
    id uuid not null,
    template text not null,
    name text not null, -- the draft's name, kept here for listings
    draft jsonb not null,
    revision bigint not null default 1, -- grows with every write; the ETag of optimistic updates
    published_version integer,
    is_public boolean not null default false, -- of the published version
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    deleted_at timestamptz,
    constraint agents_pkey primary key (workspace_id, id),
    constraint agents_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint agents_template_known check (template in ('default', 'custom')),
    constraint agents_name_length check (char_length(name) between 1 and 100),
    constraint agents_draft_is_object check (jsonb_typeof(draft) = 'object'),
    constraint agents_public_is_published check (not is_public or published_version is not null),
    constraint agents_default_is_kept check (template <> 'default' or deleted_at is null)
);

-- Immutable once written: a running task keeps the version it started with.
create table agent_versions (
    workspace_id uuid not null,
    agent_id uuid not null,
    version integer not null,
    definition jsonb not null,
    published_at timestamptz not null default now(),
    constraint agent_versions_pkey primary key (workspace_id, agent_id, version),
    constraint agent_versions_agent_fkey foreign key (workspace_id, agent_id) references agents (workspace_id, id),
    constraint agent_versions_number_positive check (version >= 1)
);

alter table agents add constraint agents_published_fkey
    foreign key (workspace_id, id, published_version) references agent_versions (workspace_id, agent_id, version);
