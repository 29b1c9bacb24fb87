set local lock_timeout = '500ms';

create index if not exists tasks_top_level_idx on tasks (workspace_id, id) where parent_task_id is null and deleted_at is null;
