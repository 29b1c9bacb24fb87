set local lock_timeout = '500ms';

drop index task_items_resume_key;
