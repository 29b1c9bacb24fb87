set local lock_timeout = '5s';

drop table await_groups;
