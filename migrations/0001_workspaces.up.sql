set local lock_timeout = '500ms';

-- A workspace is a tenant. Its id leads every key of every tenant table, so tables can be partitioned or distributed by it.
create table workspaces (
    id uuid not null,
    slug text not null,
    name text not null,
    weight integer not null default 1, -- share of worker time among workspaces (X-14)
    settings jsonb not null default '{}',
    created_at timestamptz not null default now(),
    deleted_at timestamptz,
    constraint workspaces_pkey primary key (id),
    constraint workspaces_slug_key unique (slug),
    constraint workspaces_slug_form check (slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    constraint workspaces_name_length check (char_length(name) between 1 and 100),
    constraint workspaces_weight_positive check (weight >= 1)
);
