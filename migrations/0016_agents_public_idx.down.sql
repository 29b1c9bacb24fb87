set local lock_timeout = '500ms';

drop index agents_public_idx;
