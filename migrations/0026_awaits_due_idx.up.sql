set local lock_timeout = '5s';

create index if not exists awaits_due_idx on awaits (scheduled_resume_at) where status = 'pending';
