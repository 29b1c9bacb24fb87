set local lock_timeout = '500ms';

-- External signals that came before anybody waited for them.
create index if not exists signals_early_idx on signals (created_at) where status = 'pending' and source_type = 'external';
