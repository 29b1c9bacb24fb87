set local lock_timeout = '500ms';

-- One row per delegate call and ordinal: a call that runs again adopts its children (D-26). Also finds a parent's children.
create unique index if not exists tasks_child_key on tasks (workspace_id, parent_task_id, parent_step_id, ordinal)
    where parent_task_id is not null;
