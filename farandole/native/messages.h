/* Point-to-point operations: see messages.c. */
#ifndef FARANDOLE_MESSAGES_H
#define FARANDOLE_MESSAGES_H

struct frd_group;

int messages_start(struct frd_group *, int ranks);
void messages_stop(struct frd_group *);

#endif
