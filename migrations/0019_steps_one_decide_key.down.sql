set local lock_timeout = '5s';

drop index steps_one_decide_key;
