set local lock_timeout = '500ms';

create index if not exists signals_pending_idx on signals (created_at) where status = 'pending' and source_type <> 'external';
