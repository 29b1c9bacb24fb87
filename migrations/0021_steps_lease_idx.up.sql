set local lock_timeout = '500ms';

create index if not exists steps_lease_idx on steps (lease_expires_at) where status = 'running';
