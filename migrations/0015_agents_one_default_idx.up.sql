set local lock_timeout = '5s';

create unique index agents_one_default_idx on agents (workspace_id) where template = 'default';
