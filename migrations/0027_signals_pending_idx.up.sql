set local lock_timeout = '5s';

create index signals_pending_idx on signals (created_at) where status = 'pending';
