set local lock_timeout = '500ms';

create index if not exists steps_queue_idx on steps (run_at) where status = 'queued';
