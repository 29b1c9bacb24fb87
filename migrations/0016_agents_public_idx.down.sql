set local lock_timeout = '5s';

drop index agents_public_idx;
