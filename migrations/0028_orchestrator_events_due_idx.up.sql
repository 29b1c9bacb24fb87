set local lock_timeout = '500ms';

create index if not exists orchestrator_events_due_idx on orchestrator_events (not_before, id) where dead_at is null;
