set local lock_timeout = '5s';

drop index agents_one_default_idx;
