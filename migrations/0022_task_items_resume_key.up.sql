set local lock_timeout = '500ms';

-- The id of a resume message is the id of its group: it can not be posted twice (D-22).
create unique index if not exists task_items_resume_key on task_items (workspace_id, id) where kind = 'resume_message';
