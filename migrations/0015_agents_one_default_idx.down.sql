set local lock_timeout = '500ms';

drop index agents_one_default_idx;
