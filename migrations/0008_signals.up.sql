set local lock_timeout = '500ms';

-- A fact that may complete an await. The first one wins; a second with the same dedup_key changes nothing (W-2).
create table signals (
    workspace_id uuid not null,
    source_type text not null,
    dedup_key text not null,
    correlation_key text not null,
    status text not null default 'pending',
    payload jsonb,
    created_at timestamptz not null default now(),
    settled_at timestamptz,
    constraint signals_pkey primary key (workspace_id, source_type, dedup_key),
    constraint signals_workspace_fkey foreign key (workspace_id) references workspaces (id),
    constraint signals_source_known check (source_type in ('child_task', 'user_input', 'external', 'timer')),
    constraint signals_status_known check (status in ('pending', 'matched', 'no_match')),
    constraint signals_settled_iff_terminal check ((settled_at is not null) = (status <> 'pending'))
) with (fillfactor = 60);
