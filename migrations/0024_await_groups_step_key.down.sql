set local lock_timeout = '5s';

drop index await_groups_step_key;
