set local lock_timeout = '500ms';

drop index await_groups_step_key;
