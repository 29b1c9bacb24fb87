set local lock_timeout = '500ms';

drop index steps_one_decide_key;
