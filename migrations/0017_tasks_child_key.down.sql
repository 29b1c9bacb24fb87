set local lock_timeout = '500ms';

drop index tasks_child_key;
