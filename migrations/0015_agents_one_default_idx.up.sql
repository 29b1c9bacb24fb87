set local lock_timeout = '500ms';

create unique index if not exists agents_one_default_idx on agents (workspace_id) where template = 'default';
