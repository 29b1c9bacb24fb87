set local lock_timeout = '500ms';

-- The second condition is true of whatever is due. It keeps the planner from reading this whole index where an await is
-- looked for by its key: to a planner that knows of few pending awaits all indexes of them are as good.
create index if not exists awaits_due_idx on awaits (scheduled_resume_at)
    where status = 'pending' and scheduled_resume_at is not null;
