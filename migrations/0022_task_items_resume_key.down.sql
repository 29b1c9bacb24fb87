set local lock_timeout = '5s';

drop index task_items_resume_key;
