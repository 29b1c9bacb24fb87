set local lock_timeout = '500ms';

create index if not exists await_groups_unresumed_idx on await_groups (workspace_id, task_id) where resumed_at is null;
