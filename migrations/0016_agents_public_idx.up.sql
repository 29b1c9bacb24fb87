set local lock_timeout = '500ms';

-- The roster and the targets of other workspaces.
create index if not exists agents_public_idx on agents (id) where is_public and deleted_at is null;
