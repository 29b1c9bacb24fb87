set local lock_timeout = '500ms';

-- One group per call: a call that runs again finds it.
create unique index if not exists await_groups_step_key on await_groups (workspace_id, task_id, step_id);
