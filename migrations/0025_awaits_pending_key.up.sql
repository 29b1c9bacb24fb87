set local lock_timeout = '500ms';

-- At most one pending await for one thing (W-5); also how a signal finds it.
create unique index if not exists awaits_pending_key on awaits (workspace_id, source_type, correlation_key) where status = 'pending';
