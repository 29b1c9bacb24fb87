set local lock_timeout = '500ms';

-- The first answer of a call with an Idempotency-Key, kept 24 hours.
create table idempotency_keys (
    workspace_id uuid not null,
    key text not null,
    body_hash bytea not null,
    answer jsonb not null,
    created_at timestamptz not null default now(),
    constraint idempotency_keys_pkey primary key (workspace_id, key),
    constraint idempotency_keys_key_length check (char_length(key) between 1 and 255)
);
