set local lock_timeout = '500ms';

-- At most one decide step queued or running per task (T-10).
create unique index if not exists steps_one_decide_key on steps (workspace_id, task_id)
    where ordinal = 0 and status in ('queued', 'running');
