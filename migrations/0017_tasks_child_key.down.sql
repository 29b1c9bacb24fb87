set local lock_timeout = '5s';

drop index tasks_child_key;
