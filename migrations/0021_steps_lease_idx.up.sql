set local lock_timeout = '5s';

create index if not exists steps_lease_idx on steps (lease_expires_at) where status = 'running';
