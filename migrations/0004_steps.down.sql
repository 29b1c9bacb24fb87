set local lock_timeout = '5s';

drop table steps;
